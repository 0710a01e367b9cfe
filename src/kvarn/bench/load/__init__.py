"""A load generator for servers with OpenAI's API: the requests, a client, and a summary."""

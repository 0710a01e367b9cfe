"""The server: OpenAI's protocol over one engine, which runs on a thread of its own."""

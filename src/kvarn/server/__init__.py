"""The server: OpenAI's HTTP API over one engine, which runs on its own thread."""

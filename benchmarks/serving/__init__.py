"""Load on OpenAI-compatible servers: tokens per second, first tokens and gaps between tokens by number of clients."""

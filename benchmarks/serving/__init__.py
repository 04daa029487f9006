"""Load tests of OpenAI-compatible servers: tokens per second, time to first token and gaps, by number of clients."""

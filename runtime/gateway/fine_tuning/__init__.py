"""OpenAI's fine-tuning API: files of conversations, and jobs that learn from them by supervised steps."""

"""What every route shares: the token, bodies, errors as OpenAI words them."""

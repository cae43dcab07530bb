"""The common part of all routes: the token, bodies, errors in OpenAI's words."""

"""The requests that may reach an engine: their fields, limits, tools and sampling."""

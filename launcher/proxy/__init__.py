"""The relay: an HTTP proxy on 127.0.0.1 in front of the runtime."""

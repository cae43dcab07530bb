"""An MCP server over stdio, as its makers' guide has one: a tool that adds two numbers."""

from __future__ import annotations

from mcp.server import MCPServer

server = MCPServer("adder")


@server.tool()
def add(first: int, second: int) -> int:
    """Add two numbers."""
    return first + second


server.run("stdio")

"""The agent's command line, one module per command."""

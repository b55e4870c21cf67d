"""The agent's configuration: from a ConfigMap to the settings that are active."""

"""What the model wrote -> content, reasoning and tool calls, a piece at a time."""

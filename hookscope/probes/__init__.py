"""What to keep of what passes by: one class a probe, told of values by `hooks`, handing over plain numbers."""

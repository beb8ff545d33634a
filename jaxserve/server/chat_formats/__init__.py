"""What a model's text looks like: one object per format of tool calls, one per kind of reasoning.

A format reads calls from generated text, however that is cut up, and makes the grammar that forces
calls. To add one: a file with a class that implements `ToolFormat`, and its name in `choose`.
"""

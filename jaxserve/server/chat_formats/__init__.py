"""Chat formats: how models write reasoning and tool calls in their text.

A tool call format parses calls from generated text, however the text is split, and makes the
grammar that forces calls. To add one, write a file with a class that implements `ToolFormat`, and
add its name in `choose`.
"""

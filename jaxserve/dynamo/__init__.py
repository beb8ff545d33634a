"""A worker of NVIDIA Dynamo around the engine: `python -m jaxserve.dynamo --model …`.

Dynamo's frontend renders templates, tokenises, and parses tool calls and reasoning. It sends token
ids and receives token ids. The interface is `dynamo.common.backend.engine` of ai-dynamo 1.6.
"""

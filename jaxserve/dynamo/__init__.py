"""A worker of NVIDIA Dynamo around the engine: `python -m jaxserve.dynamo --model …`.

Dynamo's frontend renders templates, tokenises, and reads tools and reasoning out of the text; it
sends token ids and gets token ids. Its contract is `dynamo.common.backend.engine` of ai-dynamo 1.6.
"""

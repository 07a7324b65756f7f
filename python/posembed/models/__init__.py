"""Other people's models: configurations of Hugging Face, Meta and Mistral, GGUF's metadata.

What is known of models is data, in JSON files; conditions are functions. Nothing downloads. Only
on request (module.py) does anything import transformers or run a model's code.
"""

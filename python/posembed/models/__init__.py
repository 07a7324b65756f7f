"""Other people's models: configurations of Hugging Face, Meta and Mistral, GGUF's metadata.

What is known of models is data, in JSON files; conditions are functions. A file runs no model's
code, and nothing imports transformers or downloads. Of an object, its own configuration class is
asked.
"""

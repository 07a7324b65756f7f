"""Other people's models: configurations of Hugging Face, Meta and Mistral, GGUF's metadata.

What is known of models is data, in JSON files; conditions are functions. Nothing here runs a
model's code, imports transformers or downloads anything.
"""

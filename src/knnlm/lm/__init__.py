"""Hidden states and next-token logits of any Hugging Face decoder.

Nothing is imported here: `lm.windows` and `lm.fingerprint` are used without torch's and transformers' import time.
"""

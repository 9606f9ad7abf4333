"""The ways of training the same model on several ranks that `bench/parallel.py` sets side by side."""

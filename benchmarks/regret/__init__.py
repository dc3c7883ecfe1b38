"""Live regret: the adaptive policy against every fixed setting, decoding with real models."""

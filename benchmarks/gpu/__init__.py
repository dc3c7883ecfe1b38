"""The engine on a GPU, part by part: `python -m benchmarks.gpu`."""

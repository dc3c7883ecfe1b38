"""Recorded runs: written, read, replayed.

    recorder  writes down what a planner was shown, answered and told    (decisions, writer, columns, parts)
    reader    reads a trace and finds what is damaged                    (rows, header)
    replay    does a controller decide again as it did?
    inspect   what is in a trace; follow: one request, step by step; regimes

Needs pyarrow: `pip install 'sdcontrol[traces]'`.
"""

"""Comparisons of policies: runs, statistics, reports."""

"""Candidates that make known mistakes, written apart from the reference, to measure what a check detects."""

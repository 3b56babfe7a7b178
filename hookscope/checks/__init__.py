"""Checks: what a gate compares with, and what did not pass. Reads earlier runs; writes and prints nothing."""

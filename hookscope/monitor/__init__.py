"""Gradients watched while a model trains: figures of every step, running statistics, events, a report."""

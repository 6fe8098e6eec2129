"""Backends: loop IR to machine code."""

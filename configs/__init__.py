"""Experiments: one file each, with its purpose, command, hardware and expected result on top.

A config file defines `get_config()` and imports the dataclasses it fills in, nothing else.
"""

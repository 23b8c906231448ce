"""Profiles of a warm call: see README.md in this folder."""

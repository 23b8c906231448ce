"""Profiles of a warm call. See README.md in this folder."""

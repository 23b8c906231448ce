"""Profiles of a warm call: see README.md beside this file."""

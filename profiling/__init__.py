"""The time of a warm call, and where it goes: see README.md beside this file."""

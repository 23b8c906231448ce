"""Where the time of a warm call goes: see README.md beside this file."""

"""Finding a posterior, whatever the method: what a method is, its run, and what is found."""

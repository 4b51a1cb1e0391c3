"""pictures: the one style of all pictures, light and dark, and their files. matplotlib, optional, draws."""

"""Everything that checks the project, and the test bed it is checked on."""

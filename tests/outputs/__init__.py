"""Everything that users and programs see, as golden texts: a change of the code shows what it changes for them."""

"""No object stops an agent: malformed objects and answers at random, by hypothesis and the schemas of the kinds."""

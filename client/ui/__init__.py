"""The page `nodeagent ui`: a web server on loopback that shows what a person may see of the cluster."""

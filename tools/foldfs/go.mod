module node-agent.invalid/tools/foldfs

go 1.26.0

require (
	github.com/hanwen/go-fuse/v2 v2.10.1
	golang.org/x/sys v0.46.0
	golang.org/x/text v0.37.0
)

// Command kopia is kopia with subcommands of the data mover beside its own.
//
// kopia's commands, flags and logs are those of the release: cli and logfile are kopia's packages. logfile is internal to
// kopia, hence the path of this module, which is below kopia's.
// Source: kopia 0.23.1, main.go.
package main

import (
	"os"

	"github.com/alecthomas/kingpin/v2"

	"github.com/kopia/kopia/cli"
	"github.com/kopia/kopia/internal/logfile"
	"github.com/kopia/kopia/repo"
)

func main() {
	kingpin.MustParse(newApplication().Parse(os.Args[1:]))
}

func newApplication() *kingpin.Application {
	app := cli.NewApp()
	parser := kingpin.New("kopia", "Kopia - Fast And Secure Open-Source Backup").Author("http://kopia.github.io/")
	parser.Version(repo.BuildVersion + " build: " + repo.BuildInfo + " from: " + repo.BuildGitHubRepo)
	logfile.Attach(app, parser)
	parser.ErrorWriter(os.Stderr)
	parser.UsageWriter(os.Stdout)
	parser.UsageTemplate(kingpin.CompactUsageTemplate)
	app.Attach(parser)
	attachBackup(parser, "mover-backup", "Back up a source", false, backUp)
	attachBackup(parser, "block-write", "Back up a device", true, backUpDevice)
	attachRestore(parser)
	attachBlockRead(parser, opener{parser}.action)
	attachBlockFetch(parser)

	return parser
}

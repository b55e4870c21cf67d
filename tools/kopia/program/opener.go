package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"strings"

	"github.com/alecthomas/kingpin/v2"
	"github.com/pkg/errors"
	"go.uber.org/zap"

	"github.com/kopia/kopia/internal/passwordpersist"
	"github.com/kopia/kopia/repo"
	"github.com/kopia/kopia/repo/logging"
	"github.com/kopia/kopia/snapshot"
)

// opener opens the repository once for a subcommand of ours.
type opener struct {
	parser *kingpin.Application
}

// work is what a subcommand of ours does with an open repository.
type work func(context.Context, repo.Repository, *report) error

// action returns the action of a subcommand that does its work, and reports errors as kopia does.
func (o opener) action(do work) kingpin.Action {
	return func(*kingpin.ParseContext) error {
		if err := o.run(logTo(context.Background(), os.Stderr), do); err != nil {
			fmt.Fprintln(os.Stderr, "ERROR", err)
			os.Exit(1)
		}

		return nil
	}
}

// logTo returns a context whose log is written as kopia's console is.
func logTo(ctx context.Context, out io.Writer) context.Context {
	console := logging.ToWriter(out)

	return logging.WithLogger(ctx, func(module string) logging.Logger {
		return console(module).WithOptions(zap.IncreaseLevel(zap.InfoLevel))
	})
}

func (o opener) run(ctx context.Context, do work) error {
	report := newReport(os.Stdout, os.Stderr)
	defer report.stop()

	rep, err := o.open(ctx)
	if err != nil {
		return errors.Wrap(err, "open repository: unable to open repository")
	}
	defer rep.Close(ctx) //nolint:errcheck // what was to be written is written

	return do(ctx, rep, report)
}

// open opens the repository as kopia does: first the password is read, then the configuration.
// Source: kopia 0.23.1, cli/config.go (openRepository), cli/password.go.
func (o opener) open(ctx context.Context) (repo.Repository, error) {
	config, password := o.value("config-file"), strings.TrimSpace(o.value("password"))
	if password == "" {
		found, err := passwordpersist.File().GetPassword(ctx, config)
		if err != nil {
			return nil, errors.Wrap(err, "get password")
		}

		password = found
	}

	// kopia derives the keys by scrypt, in 64 MiB: without a collection they stay next to what the work needs.
	// Source: kopia 0.23.1, internal/crypto/pb_key_deriver_scrypt.go.
	defer debug.FreeOSMemory()

	return repo.Open(ctx, config, password, nil)
}

// value returns the value of one of kopia's own flags.
func (o opener) value(flag string) string {
	return o.parser.GetFlag(flag).Model().Value.String()
}

func parseSource(rep repo.Repository, text string) (snapshot.SourceInfo, error) {
	client := rep.ClientOptions()
	source, err := snapshot.ParseSourceInfo(text, client.Hostname, client.Username)

	return source, errors.Wrapf(err, "not a valid source %v", text)
}

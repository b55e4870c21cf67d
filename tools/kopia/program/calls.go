package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"strings"

	"github.com/alecthomas/kingpin/v2"
	"github.com/pkg/errors"
	"golang.org/x/sys/unix"

	"github.com/kopia/kopia/repo"
	"github.com/kopia/kopia/repo/content"
	"github.com/kopia/kopia/repo/manifest"
	"github.com/kopia/kopia/snapshot/snapshotfs"
)

// mostCallBytes is more than the arguments of a program may have.
const mostCallBytes = 4 << 20

// call is one line of standard input. Beside it come descriptors for output and messages, and of a device, if there is one.
type call struct {
	Arguments []string `json:"arguments"`

	output, messages *os.File
	device           int
}

// answer says how a call ended, as a kopia of its own would have, and what it and the opening before it have counted.
type answer struct {
	ExitCode int    `json:"exit_code"`
	Counters string `json:"counters"`
}

// attachRestore adds the subcommand mover-restore, which opens the repository once, and carries out one call after the
// other: the commands of kopia and ours that a restore needs, with the same arguments, output, messages and exit codes.
//
// Standard input is a socket. Standard output has a JSON line {"answer": …} for each call.
func attachRestore(parser *kingpin.Application) {
	command := parser.Command("mover-restore", "Carry out the calls that come by standard input (for the data mover)").Hidden()
	open := opener{parser}
	command.Action(func(parsed *kingpin.ParseContext) error {
		stop := serveCounters(open.value("metrics-listen-addr"), nil)

		return open.action(func(ctx context.Context, rep repo.Repository, report *report) error {
			stop()
			report.stop()

			conn, err := net.FileConn(os.Stdin)
			if err != nil {
				return errors.Wrap(err, "standard input")
			}

			socket, ok := conn.(*net.UnixConn)
			if !ok {
				return errors.New("standard input is no local socket")
			}

			return serveCalls(ctx, rep, socket, report)
		})(parsed)
	})
}

// serveCalls carries out calls until there are no more.
func serveCalls(ctx context.Context, rep repo.Repository, socket *net.UnixConn, report *report) error {
	reader := &callReader{socket: socket, buffer: make([]byte, 1<<16)}

	// The first call has opened the repository.
	var before counters

	for {
		next, err := reader.read()
		if errors.Is(err, io.EOF) {
			return nil
		}

		if err != nil {
			return errors.Wrap(err, "read a call")
		}

		done := next.carryOut(ctx, rep, before)
		before = readCounters()

		if err := report.write("answer", done); err != nil {
			return err
		}
	}
}

// callReader reads one call after the other; the next one comes once the last one is answered.
type callReader struct {
	socket      *net.UnixConn
	buffer      []byte
	pending     []byte
	descriptors []int
}

func (r *callReader) read() (*call, error) {
	rights := make([]byte, unix.CmsgSpace(16*4))

	for {
		line, rest, found := bytes.Cut(r.pending, []byte("\n"))
		if found {
			r.pending = rest

			return r.parse(line)
		}

		if len(r.pending) > mostCallBytes {
			return nil, errors.New("it is too long")
		}

		count, rightsCount, _, _, err := r.socket.ReadMsgUnix(r.buffer, rights)
		if err == nil && count == 0 {
			err = io.EOF
		}

		if err != nil {
			return nil, err
		}

		messages, err := unix.ParseSocketControlMessage(rights[:rightsCount])
		if err != nil {
			return nil, err
		}

		for _, one := range messages {
			found, err := unix.ParseUnixRights(&one)
			if err != nil {
				return nil, err
			}

			r.descriptors = append(r.descriptors, found...)
		}

		r.pending = append(r.pending, r.buffer[:count]...)
	}
}

func (r *callReader) parse(line []byte) (*call, error) {
	descriptors := r.descriptors
	r.descriptors = nil

	if len(descriptors) != 2 && len(descriptors) != 3 {
		return nil, errors.Errorf("it has %v descriptors", len(descriptors))
	}

	parsed := &call{
		output:   os.NewFile(uintptr(descriptors[0]), "output"),
		messages: os.NewFile(uintptr(descriptors[1]), "messages"),
		device:   -1,
	}
	if len(descriptors) > 2 {
		parsed.device = descriptors[2]
	}

	return parsed, json.Unmarshal(line, parsed)
}

// carryOut does what a kopia with these arguments does; before is what was counted earlier.
func (c *call) carryOut(ctx context.Context, rep repo.Repository, before counters) *answer {
	done := &answer{}
	if _, err := c.newParser(logTo(ctx, c.messages), rep, before).Parse(c.givenArguments()); err != nil {
		fmt.Fprintln(c.messages, err) //nolint:errcheck // it fails once the mover is gone

		done.ExitCode = 1
	}

	done.Counters = readCounters().since(before)

	// So the mover reads their ends.
	c.output.Close()   //nolint:errcheck // it fails once the mover is gone
	c.messages.Close() //nolint:errcheck

	return done
}

// givenArguments returns the arguments with the number that the descriptor of the device has here.
func (c *call) givenArguments() []string {
	given := make([]string, len(c.Arguments))

	for at, one := range c.Arguments {
		if strings.HasPrefix(one, "--device-fd=") {
			one = fmt.Sprintf("--device-fd=%v", c.device)
		}

		given[at] = one
	}

	return given
}

// newParser returns a parser for one call, which knows the commands that need nothing but an open repository.
func (c *call) newParser(ctx context.Context, rep repo.Repository, before counters) *kingpin.Application {
	parser := kingpin.New("kopia", "").Terminate(nil).ErrorWriter(c.messages).UsageWriter(c.messages)
	address := parser.Flag("metrics-listen-addr", "").String()
	progress := &restoreProgress{out: c.messages}
	parser.Flag("progress", "").BoolVar(&progress.enabled)
	parser.Flag("progress-update-interval", "").Default("300ms").DurationVar(&progress.interval)
	// The answer has what these would write to a file.
	parser.Flag("metrics-store-on-exit", "").Bool()
	parser.Flag("diagnostics-output-directory", "").String()

	action := func(work func() error) kingpin.Action {
		return func(*kingpin.ParseContext) error {
			defer serveCounters(*address, before)()

			return work()
		}
	}

	items := parser.Command("manifest", "").Command("show", "")
	ids := items.Arg("item", "").Required().Strings()
	items.Action(action(func() error { return c.showManifests(ctx, rep, *ids) }))

	contents := parser.Command("content", "").Command("show", "")
	contentIDs := contents.Arg("id", "").Required().Strings()
	contents.Action(action(func() error { return c.showContents(ctx, rep, *contentIDs) }))

	object := parser.Command("show", "")
	path := object.Arg("object-path", "").Required().String()
	object.Action(action(func() error { return c.showObject(ctx, rep, *path) }))

	restoring := &restorer{output: c.output, progress: progress}
	restoring.attach(parser).Action(action(func() error { return restoring.restore(ctx, rep) }))

	attachBlockRead(parser, func(do work) kingpin.Action {
		return action(func() error {
			report := newReport(c.output, c.messages)
			defer report.stop()

			return do(ctx, rep, report)
		})
	})

	return parser
}

// showManifests writes the content of manifests. Source: kopia 0.23.1, cli/command_manifest_show.go.
func (c *call) showManifests(ctx context.Context, rep repo.Repository, ids []string) error {
	for _, one := range ids {
		var found json.RawMessage

		if _, err := rep.GetManifest(ctx, manifest.ID(one), &found); err != nil {
			return errors.Wrapf(err, "error getting metadata for %q", one)
		}

		if _, err := c.output.Write(found); err != nil {
			return errors.Wrap(err, "error copying data")
		}
	}

	return nil
}

// showContents writes contents one after the other. Source: kopia 0.23.1, cli/command_content_show.go.
func (c *call) showContents(ctx context.Context, rep repo.Repository, ids []string) error {
	direct, ok := rep.(repo.DirectRepository)
	if !ok {
		return errors.New("operation supported only on direct repository")
	}

	for _, one := range ids {
		id, err := content.ParseID(one)
		if err != nil {
			return errors.Wrapf(err, "error parsing content ID %v", one)
		}

		data, err := direct.ContentReader().GetContent(ctx, id)
		if err != nil {
			return errors.Wrapf(err, "error getting content %v", id)
		}

		if _, err := c.output.Write(data); err != nil {
			return errors.Wrap(err, "error copying data")
		}
	}

	return nil
}

// showObject writes what an object has. Source: kopia 0.23.1, cli/command_show.go.
func (c *call) showObject(ctx context.Context, rep repo.Repository, path string) error {
	id, err := snapshotfs.ParseObjectIDWithPath(ctx, rep, path)
	if err != nil {
		return errors.Wrapf(err, "unable to parse ID: %v", path)
	}

	reader, err := rep.OpenObject(ctx, id)
	if err != nil {
		return errors.Wrapf(err, "error opening object %v", id)
	}
	defer reader.Close() //nolint:errcheck // it was only read

	_, err = io.Copy(c.output, reader)

	return errors.Wrap(err, "unable to copy data")
}

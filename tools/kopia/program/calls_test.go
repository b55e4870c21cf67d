package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// caller asks for calls as the data mover does.
type caller struct {
	*testing.T

	socket  *net.UnixConn
	answers *json.Decoder
	ended   chan error
}

// startCalls serves calls on the bench's repository until the end of the test.
func startCalls(b *bench) *caller {
	b.Helper()

	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	must(b.T, err)

	ours, theirs := socketOf(b.T, pair[0]), socketOf(b.T, pair[1])
	answers, out := io.Pipe()
	c := &caller{b.T, ours, json.NewDecoder(answers), make(chan error, 1)}

	report := newReport(out, io.Discard)
	report.once.Do(func() { close(report.ended) })

	go func() {
		c.ended <- serveCalls(context.Background(), b.rep, theirs, report)

		out.Close()
	}()

	b.Cleanup(func() { ours.Close() })

	return c
}

func socketOf(t *testing.T, fd int) *net.UnixConn {
	t.Helper()

	file := os.NewFile(uintptr(fd), "socket")
	defer file.Close()

	conn, err := net.FileConn(file)
	must(t, err)

	return conn.(*net.UnixConn)
}

// call returns the exit code, the output and the messages of one call.
func (c *caller) call(arguments ...string) (int, string, string) {
	c.Helper()

	output, messages := c.file("output"), c.file("messages")
	line, err := json.Marshal(&call{Arguments: arguments})
	must(c.T, err)
	c.send(append(line, '\n'), output, messages)

	var said map[string]*answer

	must(c.T, c.answers.Decode(&said))

	if !strings.Contains(said["answer"].Counters, "kopia_content_read_bytes_total ") {
		c.Fatalf("counters: %q", said["answer"].Counters)
	}

	return said["answer"].ExitCode, read(c.T, output), read(c.T, messages)
}

func (c *caller) send(line []byte, files ...*os.File) {
	c.Helper()

	descriptors := make([]int, len(files))
	for at, one := range files {
		descriptors[at] = int(one.Fd())
	}

	_, _, err := c.socket.WriteMsgUnix(line, unix.UnixRights(descriptors...), nil)
	must(c.T, err)
}

func (c *caller) file(name string) *os.File {
	c.Helper()

	file, err := os.Create(filepath.Join(c.TempDir(), name))
	must(c.T, err)
	c.Cleanup(func() { file.Close() })

	return file
}

func read(t *testing.T, file *os.File) string {
	t.Helper()

	content, err := os.ReadFile(file.Name())
	must(t, err)

	return string(content)
}

func TestCallsThatARestoreNeeds(t *testing.T) {
	b := newBench(t)
	made := b.backUp(decision{}).result.Snapshot
	c := startCalls(b)
	target := filepath.Join(t.TempDir(), "target")

	code, output, _ := c.call("manifest", "show", string(made.ID))

	var found struct {
		RootEntry struct {
			Object string `json:"obj"`
		} `json:"rootEntry"`
	}

	must(t, json.Unmarshal([]byte(output), &found))

	if code != 0 || found.RootEntry.Object != made.RootEntry.ObjectID.String() {
		t.Fatalf("manifest: %v %v", code, output)
	}

	_, whole, _ := c.call("show", found.RootEntry.Object)
	_, twice, _ := c.call("content", "show", found.RootEntry.Object, found.RootEntry.Object, "--metrics-store-on-exit")

	if !strings.Contains(whole, `"below"`) || twice != whole+whole {
		t.Fatalf("directory: %q and %q", whole, twice)
	}

	code, _, messages := c.call("--progress", "restore", string(made.ID), target, "--mode=local", "--write-sparse-files")
	if code != 0 || !strings.HasSuffix(messages, "Processed 4 (11 B) of 3 (11 B).\n") {
		t.Fatalf("restore: %v %v", code, messages)
	}

	content, err := os.ReadFile(filepath.Join(target, "below", "two"))
	if err != nil || string(content) != "second" {
		t.Fatalf("restored %q: %v", content, err)
	}

	_, archive, _ := c.call("restore", string(made.ID), "-", "--mode=tar")
	if !strings.Contains(archive, "below/two") {
		t.Fatal("no archive")
	}
}

func TestPlaceholdersAreRestored(t *testing.T) {
	b := newBench(t)
	made := b.backUp(decision{}).result.Snapshot
	c := startCalls(b)
	target := t.TempDir()

	_, root, _ := c.call("show", made.RootEntry.ObjectID.String())

	var directory struct {
		Entries []json.RawMessage `json:"entries"`
	}

	must(t, json.Unmarshal([]byte(root), &directory))

	at := filepath.Join(target, "below.kopia-entry")
	must(t, os.WriteFile(at, directory.Entries[0], 0o600))

	if code, _, messages := c.call("restore", at, "--shallow=2147483646", "--mode=local"); code != 0 {
		t.Fatal(messages)
	}

	if content, err := os.ReadFile(filepath.Join(target, "below", "two")); err != nil || string(content) != "second" {
		t.Fatalf("restored %q: %v", content, err)
	}
}

func TestCallsThatFail(t *testing.T) {
	b := newBench(t)
	made := b.backUp(decision{}).result.Snapshot
	c := startCalls(b)

	file := filepath.Join(t.TempDir(), "file")
	must(t, os.WriteFile(file, nil, 0o600))

	for _, one := range []struct {
		arguments []string
		message   string
	}{
		{[]string{"manifest", "show", "0123"}, `error getting metadata for "0123": `},
		{[]string{"show", "kffff"}, "error opening object kffff: "},
		{[]string{"content", "show", "-x"}, "unknown short flag '-x'"},
		{[]string{"restore", string(made.ID), file, "--mode=local"}, "error restoring: restore error: "},
		{[]string{"restore", "one", "--mode=local"}, "restore requires a source and targetpath or placeholders"},
		{[]string{"block-read", "--root=k1", "--size=1", "--parallel=1", "--device-fd=7", "--device-size=1"}, "descriptor -1 is not of an open device"},
		{[]string{"snapshot", "delete", string(made.ID)}, "expected command but got \"snapshot\""},
		{[]string{"repository", "status"}, "expected command"},
	} {
		code, _, messages := c.call(one.arguments...)
		if code != 1 || !strings.Contains(messages, one.message) {
			t.Errorf("%v: %v %q", one.arguments, code, messages)
		}
	}

	if code, _, _ := c.call("manifest", "show", string(made.ID)); code != 0 {
		t.Error("the next call fails too")
	}
}

func TestWhatIsNoCallEndsAll(t *testing.T) {
	for name, lines := range map[string][]byte{
		"without descriptors": []byte("{}\n"),
		"no JSON":             []byte("{\n"),
		"too long":            bytes.Repeat([]byte("x"), mostCallBytes+1<<17),
	} {
		t.Run(name, func(t *testing.T) {
			c := startCalls(newBench(t))

			if name == "no JSON" {
				c.send(lines, c.file("output"), c.file("messages"))
			} else {
				go c.socket.Write(lines) //nolint:errcheck // it is not read to its end
			}

			if err := <-c.ended; err == nil {
				t.Error("no error")
			}
		})
	}
}

func TestTheEndOfTheCallsIsNoError(t *testing.T) {
	c := startCalls(newBench(t))
	must(t, c.socket.Close())
	must(t, <-c.ended)
}

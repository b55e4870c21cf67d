package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/kopia/kopia/repo"
	"github.com/kopia/kopia/repo/manifest"
	"github.com/kopia/kopia/repo/object"
	"github.com/kopia/kopia/snapshot"
)

// fetch answers the requests for a stored file, and returns what the file beside has then.
func (b *bench) fetch(id object.ID, size int, requests string) ([]byte, string, error) {
	b.Helper()

	var out bytes.Buffer

	to, path := b.device(make([]byte, size))
	err := fetchBlocks(context.Background(), b.rep, id, to, strings.NewReader(requests), newReport(&out, io.Discard))
	content, readErr := os.ReadFile(path)
	must(b.T, readErr)

	return content, out.String(), err
}

func (b *bench) deviceObject(root object.ID) object.ID {
	b.Helper()

	var directory snapshot.DirManifest

	must(b.T, json.Unmarshal([]byte(b.content(root)), &directory))

	return directory.Entries[0].ObjectID
}

// stream stores a file as kopia itself does, in pieces whose length depends on the content, or of the length named.
func (b *bench) stream(content []byte, splitter string) object.ID {
	b.Helper()

	var id object.ID

	must(b.T, repo.WriteSession(context.Background(), b.rep, repo.WriteSessionOptions{}, func(ctx context.Context, w repo.RepositoryWriter) error {
		writer := w.NewObjectWriter(ctx, object.WriterOptions{Splitter: splitter, Compressor: metadataCompressor})
		defer writer.Close() //nolint:errcheck // tests

		if _, err := writer.Write(content); err != nil {
			return err
		}

		var err error

		id, err = writer.Result()

		return err
	}))
	must(b.T, b.rep.Refresh(context.Background()))

	return id
}

func TestBlocksAreFetchedFromAnyFormat(t *testing.T) {
	b, random := newBench(t), newSeeded()
	content := append(random.bytes(2*blockSize+700), make([]byte, 2*blockSize)...)
	content = append(content, random.bytes(3*blockSize)...)
	made := b.writeDevice(content, blockDecision{})

	for name, id := range map[string]object.ID{
		"block":  b.deviceObject(made.Snapshot.RootObjectID()),
		"large":  b.stream(content, "FIXED-8M"),
		"small":  b.stream(content, "FIXED-128K"),
		"uneven": b.stream(content, "DYNAMIC-1M-BUZHASH"),
	} {
		got, out, err := b.fetch(id, len(content), "6 2\n1 1\n")
		must(t, err)

		want := make([]byte, len(content))
		copy(want[blockSize:2*blockSize], content[blockSize:])
		copy(want[6*blockSize:], content[6*blockSize:])

		if !bytes.Equal(got, want) || !strings.HasSuffix(out, "{\"fetched\":2}\n{\"fetched\":1}\n") {
			t.Errorf("%v: other blocks were fetched: %v", name, out)
		}
	}
}

// TestOddRequestIsRefused has random ones: each names blocks of the device, or is an error.
func TestOddRequestIsRefused(t *testing.T) {
	random, words := newSeeded(), []string{"0", "1", "-1", "6", "7", "8", "1025", "9223372036854775807", "1e3", "x", "", "0 1", "+1", "\x00"}

	for range 2000 {
		line := words[random.IntN(len(words))] + []string{" ", "\t", "  ", ",", ""}[random.IntN(5)] + words[random.IntN(len(words))]

		first, count, err := parseRequest(line, 8)
		if err == nil && (first < 0 || count < 1 || first+count > 8) {
			t.Errorf("%q is taken for %v and %v", line, first, count)
		}
	}

	b := newBench(t)
	if _, out, err := b.fetch(b.stream(zeroBlock, "FIXED-1M"), blockSize, "0 2\n"); err == nil || strings.Contains(out, "fetched") {
		t.Errorf("a block beyond the end was fetched: %v", out)
	}
}

// TestDamagedFileIsNeverFetched has lists that random damage has changed: an error, or blocks that are the device's.
func TestDamagedFileIsNeverFetched(t *testing.T) {
	b, random := newBench(t), newSeeded()
	content := random.bytes(3 * blockSize)
	valid := b.content(indexOf(b, b.writeDevice(content, blockDecision{}).Snapshot.RootObjectID()))
	refused := 0

	for _, text := range damage(random, valid, 80) {
		got, out, err := b.fetch(b.deviceObject(b.writeList(text)), len(content), "0 3\n")
		if err != nil {
			refused++

			continue
		}

		// What a list names is what is fetched: it may name a block twice, never another length.
		for at := 0; at < len(content); at += blockSize {
			if !bytes.Contains(content, got[at:at+blockSize]) {
				t.Errorf("%s: block %v is none of the device; %v", text, at/blockSize, out)
			}
		}
	}

	if refused < 40 {
		t.Errorf("only %v were refused", refused)
	}
}

// TestDamagedParentNeverChangesTheDevice backs a device up after parents whose lists are damaged in many ways.
func TestDamagedParentNeverChangesTheDevice(t *testing.T) {
	b, random := newBench(t), newSeeded()
	content := random.bytes(3 * blockSize)
	valid := b.content(indexOf(b, b.writeDevice(content, blockDecision{}).Snapshot.RootObjectID()))
	there := bytes.Repeat([]byte{0xff}, len(content))

	for _, text := range damage(random, valid, 15) {
		copy(content[blockSize*random.IntN(3):], random.bytes(100))

		made := b.writeDevice(content, blockDecision{Parent: b.saveSnapshot(b.writeList(text))})

		restored, _, err := b.readDevice(made, len(content), there, false)
		if err != nil || !bytes.Equal(restored, content) {
			t.Fatalf("after the parent %s: %v", text, err)
		}
	}
}

// TestOddDecisionIsAnErrorOrTheDevice has decisions that random damage has changed.
func TestOddDecisionIsAnErrorOrTheDevice(t *testing.T) {
	b, random := newBench(t), newSeeded()
	content := random.bytes(blockSize + 512)
	first := b.writeDevice(content, blockDecision{})
	there := bytes.Repeat([]byte{0xff}, 2*blockSize)
	valid := fmt.Sprintf(`{"parent":"%v","tags":{"a":"1"},"pins":["p"],"parallel":2,"checkpoint":`+
		`{"path":"saved","seconds":1,"resume":"%v","replaces":["0"]}}`, first.Snapshot.ID, first.Snapshot.ID)

	for _, text := range damage(random, valid, 30) {
		var out bytes.Buffer

		from, _ := b.device(content)
		report := newReport(&out, io.Discard)
		err := backUpDevice(context.Background(), b.rep, blockSource, from, strings.NewReader(text), report)

		report.stop()

		if err != nil {
			continue
		}

		lines := bytes.Split(bytes.TrimSpace(out.Bytes()), []byte("\n"))

		var last struct {
			Result *blockResult `json:"result"`
		}

		for _, line := range lines {
			must(t, json.Unmarshal(line, &last))
		}

		restored, _, err := b.readDevice(last.Result, len(content), there, false)
		if err != nil || !bytes.Equal(restored[:len(content)], content) {
			t.Fatalf("after the decision %s: %v", text, err)
		}
	}
}

// damage returns texts in which one place is replaced by something odd.
func damage(random seeded, valid string, count int) []string {
	pieces := []string{"", "0", "-1", "I", "Ix", "x", "null", "[]", "{}", `"`, ",", "9223372036854775807", "1e9", "1048576", "\xff"}
	damaged := []string{"", "{}", `{"entries":[]}`, `{"entries":[{"l":1048576,"o":"Ixff"},{"s":1048576},{"s":2097152}]}`}

	for range count {
		at := random.IntN(len(valid))
		end := min(len(valid), at+random.IntN(20))
		damaged = append(damaged, valid[:at]+pieces[random.IntN(len(pieces))]+valid[end:])
	}

	return damaged
}

// saveSnapshot saves a snapshot of a directory as that of a device.
func (b *bench) saveSnapshot(root object.ID) manifest.ID {
	b.Helper()

	made := buildManifest(blockSource, root, 3*blockSize, nil, nil)

	must(b.T, repo.WriteSession(context.Background(), b.rep, repo.WriteSessionOptions{}, func(ctx context.Context, w repo.RepositoryWriter) error {
		id, err := snapshot.SaveSnapshot(ctx, w, made)
		made.ID = id

		return err
	}))
	must(b.T, b.rep.Refresh(context.Background()))

	return made.ID
}

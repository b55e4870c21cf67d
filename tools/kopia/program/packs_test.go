package main

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/pkg/errors"

	"github.com/kopia/kopia/repo"
	"github.com/kopia/kopia/repo/content"
	"github.com/kopia/kopia/repo/object"
)

const manyFiles = 240

// manyNames are files in three folders, the last of them a small one.
func manyNames() (names []string) {
	for at := range manyFiles {
		folder := []string{"below", "other"}[at%2]
		if at%40 == 0 {
			folder = "few"
		}

		names = append(names, fmt.Sprintf("%v/%v", folder, at))
	}

	return names
}

// requestsOf returns how many requests for data of the storage work takes, and how much it reads.
func requestsOf(work func()) (requests, bytes float64) {
	before := readCounters()
	work()
	after := readCounters()

	for name := range after {
		if strings.HasPrefix(name, latency+"_count") && strings.Contains(name, "GetBlob") {
			requests += after[name] - before[name]
		}
	}

	const partial, full = "kopia_blob_download_partial_blob_bytes_total", "kopia_blob_download_full_blob_bytes_total"

	return requests, after[partial] + after[full] - before[partial] - before[full]
}

func TestSmallFilesAreReadByThePack(t *testing.T) {
	random := newSeeded()
	b := newBench(t)
	contents := map[string]string{"one": "first", "below/two": "second"}

	for _, folder := range []string{"other", "few"} {
		must(t, os.Mkdir(filepath.Join(b.volume, folder), 0o700))
	}

	for _, name := range manyNames() {
		contents[name] = string(random.bytes(20_000))
		b.write(name, contents[name])
	}

	must(t, os.Symlink("one", filepath.Join(b.volume, "other", "link")))
	made := b.backUp(decision{}).result.Snapshot

	for name, one := range map[string]struct {
		from      string
		exist     func(name string) bool
		flags     string
		byContent bool
	}{
		"all":              {},
		"a small folder":   {from: "/few", byContent: true},
		"few are missing":  {exist: func(name string) bool { return !strings.HasPrefix(name, "few/") }, flags: "--packs=2 --skip-existing", byContent: true},
		"few exist":        {exist: func(name string) bool { return strings.HasPrefix(name, "few/") }, flags: "--packs=2 --skip-existing"},
		"one by one":       {flags: "--packs=0", byContent: true},
		"a pack at a time": {flags: "--packs=1"},
	} {
		t.Run(name, func(t *testing.T) {
			cache := t.TempDir()
			t.Setenv("KOPIA_CACHE_DIRECTORY", cache)

			caching := content.CachingOptions{CacheDirectory: cache, ContentCacheSizeBytes: 1 << 30}
			must(t, repo.SetCachingOptions(context.Background(), b.config, &caching))
			b.reopen(0)

			target := t.TempDir()

			for name, text := range contents {
				if one.exist != nil && one.exist(name) {
					must(t, os.MkdirAll(filepath.Dir(filepath.Join(target, name)), 0o700))
					must(t, os.WriteFile(filepath.Join(target, name), []byte(text), 0o600))

					stat, err := os.Stat(filepath.Join(b.volume, name))
					must(t, err)
					must(t, os.Chtimes(filepath.Join(target, name), stat.ModTime(), stat.ModTime()))
				}
			}

			c, wanted := startCalls(b), 0

			requests, bytes := requestsOf(func() {
				arguments := append([]string{"restore", string(made.ID) + one.from, target, "--mode=local"}, strings.Fields(cmp.Or(one.flags, "--packs=2"))...)
				if code, _, messages := c.call(arguments...); code != 0 {
					t.Fatal(messages)
				}
			})

			if left, _ := filepath.Glob(filepath.Join(cache, "contents", "*", "*p.f")); len(left) > 0 {
				t.Errorf("packs are left: %v", left)
			}

			for name, text := range contents {
				path, below := strings.CutPrefix("/"+name, one.from+"/")
				if !below {
					continue
				}

				if found, err := os.ReadFile(filepath.Join(target, path)); err != nil || string(found) != text {
					t.Errorf("%v: %v bytes, %v", name, len(found), err)
				}

				if one.exist == nil || !one.exist(name) {
					wanted++
				}
			}

			if byContent := requests >= float64(wanted); byContent != one.byContent || (byContent && bytes > float64(wanted)*40_000) {
				t.Errorf("%v requests for %v files, %v bytes", requests, wanted, bytes)
			}
		})
	}
}

func TestLargeFilesAreReadAhead(t *testing.T) {
	b := newBench(t)
	content := string(newSeeded().bytes(40 << 20))
	b.write("large", content)
	b.write("below/larger", content[:30<<20])

	made := b.backUp(decision{}).result.Snapshot
	restored := func(flags ...string) (int, string, string) {
		b.reopen(0)

		target := t.TempDir()
		code, _, messages := startCalls(b).call(append([]string{"restore", string(made.ID), target, "--mode=local", "--packs=1"}, flags...)...)

		return code, messages, target
	}

	for _, flags := range [][]string{{"--parallel=1"}, {"--parallel=2"}, {"--parallel=8", "--write-sparse-files"}} {
		code, messages, target := restored(flags...)
		if code != 0 {
			t.Fatal(messages)
		}

		for name, size := range map[string]int{"large": 40 << 20, "below/larger": 30 << 20} {
			if found, err := os.ReadFile(filepath.Join(target, name)); err != nil || string(found) != content[:size] {
				t.Errorf("%v: %v is another one with %v bytes: %v", flags, name, len(found), err)
			}
		}
	}

	packs, err := filepath.Glob(filepath.Join(filepath.Dir(b.config), "store", "p*", "*", "*"))
	must(t, err)

	for _, one := range packs {
		must(t, os.Rename(one, one+".away"))

		if code, messages, _ := restored("--parallel=4"); code == 0 || !strings.Contains(messages, "BLOB not found") {
			t.Errorf("without %v: %v %v", one, code, messages)
		}

		must(t, os.Rename(one+".away", one))
	}
}

func TestAFileThatShrankWhileItWasReadIsRestored(t *testing.T) {
	b, ctx := newBench(t), context.Background()
	content := newSeeded().bytes(20 << 20)
	ctx, w, err := b.rep.NewWriter(ctx, repo.WriteSessionOptions{})
	must(t, err)

	v := &veleros{bench: b, w: w}
	parts := []object.ID{v.write(content, object.WriterOptions{}), v.write(nil, object.WriterOptions{})}
	id, err := w.ConcatenateObjects(ctx, parts, repo.ConcatenateOptions{})
	must(t, err)
	must(t, w.Flush(ctx))
	must(t, w.Close(ctx))
	b.reopen(0)

	target := filepath.Join(t.TempDir(), "file")
	if code, _, messages := startCalls(b).call("restore", id.String(), target, "--mode=local", "--packs=2"); code != 0 {
		t.Fatal(messages)
	}

	if found, err := os.ReadFile(target); err != nil || string(found) != string(content) {
		t.Errorf("another file with %v bytes: %v", len(found), err)
	}
}

// TestALargeFileIsReadByWholeBuffers has blocks that lie in two parts: kopia looks in each read for one that is a hole.
func TestALargeFileIsReadByWholeBuffers(t *testing.T) {
	b, ctx, content := newBench(t), context.Background(), newSeeded().bytes(20<<20)
	direct, _ := b.rep.(repo.DirectRepository)
	plan := newPackPlan(ctx, direct, 1, 2, nil)
	stored := b.stream(content, "DYNAMIC-1M-BUZHASH")

	parts, err := loadParts(ctx, b.rep, stored, int64(len(content)))
	must(t, err)

	reader, buffer := plan.openAhead(ctx, nil, parts), make([]byte, 4096)

	for at := 0; at < len(content); at += len(buffer) {
		if count, err := reader.Read(buffer); count != len(buffer) || err != nil || !bytes.Equal(buffer, content[at:at+count]) {
			t.Fatalf("%v bytes at %v of %v parts: %v", count, at, len(parts), err)
		}
	}

	if count, err := reader.Read(buffer); count != 0 || !errors.Is(err, io.EOF) {
		t.Errorf("%v bytes at the end: %v", count, err)
	}

	must(t, reader.Close())
}

func TestALengthThatNoPartHasIsAnError(t *testing.T) {
	b := newBench(t)
	valid := b.writeDevice(zeroBlock, blockDecision{}).Snapshot.RootObjectID()
	block := strings.SplitAfter(b.content(indexOf(b, valid)), `"o":"`)[1]
	damaged := b.writeList(`{"entries":[{"l":1125899906842624,"o":"` + block)

	code, _, messages := startCalls(b).call("restore", damaged.String(), t.TempDir(), "--mode=local", "--packs=2")
	if code == 0 || !strings.Contains(messages, "unexpected chunk length") {
		t.Errorf("%v %v", code, messages)
	}
}

func TestAPackThatNothingNeedsAnyMoreMayStillBeFetched(t *testing.T) {
	b := newBench(t)
	b.backUp(decision{})

	var infos []content.Info

	direct, _ := b.rep.(repo.DirectRepository)
	must(t, direct.ContentReader().IterateContents(context.Background(), content.IterateOptions{}, func(info content.Info) error {
		infos = append(infos, info)

		return nil
	}))

	plan := newPackPlan(context.Background(), direct, 1, 1, nil)
	plan.cache = t.TempDir()
	plan.slots <- struct{}{}

	for range 2 * fewContents {
		plan.add(infos[0])
	}

	// As if an index that was read meanwhile had moved what others hold to this pack.
	pack := plan.order[0]
	go plan.hold(context.Background(), object.DirectObjectID(infos[0].ContentID))

	for started := false; !started; {
		runtime.Gosched()
		plan.mu.Lock()
		started = pack.fetched != nil
		plan.mu.Unlock()
	}

	for range 2 * fewContents {
		plan.release(pack, infos[0])
	}

	<-plan.slots
	plan.tasks.Wait()
}

func TestAnArchiveIsReadAsFarAheadAsTheMemoryForPacksAllows(t *testing.T) {
	b := newBench(t)

	for mode, readers := range map[string]int{"tar": 2, "local": 8} {
		r := restorer{mode: mode, parallel: 16, packs: 1, shallow: allLevels}
		output, err := r.open(context.Background(), t.TempDir())
		must(t, err)

		plan, end := r.plan(context.Background(), b.rep, output)
		end()

		if cap(plan.readers) != readers {
			t.Errorf("%v: %v", mode, cap(plan.readers))
		}
	}
}

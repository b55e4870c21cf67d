package main

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pkg/errors"

	"github.com/kopia/kopia/fs"
	"github.com/kopia/kopia/repo"
	"github.com/kopia/kopia/repo/manifest"
	"github.com/kopia/kopia/repo/object"
	"github.com/kopia/kopia/snapshot"
	"github.com/kopia/kopia/snapshot/upload"
)

// Checkpoints of the backup of a device: the list of its first blocks, as an incomplete snapshot.
//
// kopia's maintenance keeps what an incomplete snapshot refers to. Its source is not the device's, and it has none of the
// tags by which Velero looks for a parent. One write to the repository replaces a checkpoint by the next one, or by the
// snapshot: whenever kopia is killed, there is one of them, and all that it refers to is stored.

// Tags of a checkpoint: the source of its backup, and which blocks were read and where the others are from.
const (
	sourceTag = tagPrefix + "nodeagent.io/checkpoint-source"
	ruleTag   = tagPrefix + "nodeagent.io/checkpoint-rule"
)

// checkpointDecision says where and how often the blocks so far are saved, and which checkpoint is continued from. Path is
// that of their source, whose host and user are the device's.
type checkpointDecision struct {
	Path    string            `json:"path"`
	Tags    map[string]string `json:"tags"`
	Seconds float64           `json:"seconds"`
	// Resume is of an earlier attempt, or empty.
	Resume manifest.ID `json:"resume"`
	// Replaces are deleted together with the next write of a checkpoint or snapshot.
	Replaces []manifest.ID `json:"replaces"`
}

// checkpointer saves which blocks are done; all methods may be called at the same time.
type checkpointer struct {
	writer  *blockWriter
	decided *checkpointDecision
	of      snapshot.SourceInfo

	// stopped: the blocks that are being read are the last ones.
	stopped atomic.Bool

	mu sync.Mutex
	// end is the number of blocks, from the first one, that are done; beyond are others that are done.
	end    int
	beyond map[int]struct{}

	saving sync.Mutex
	// saved may not be in the repository if that is unsure.
	saved  *snapshot.Manifest
	unsure bool
}

func (c *checkpointer) finish(at int) {
	c.mu.Lock()
	defer c.mu.Unlock()

	c.beyond[at] = struct{}{}
	for _, done := c.beyond[c.end]; done; _, done = c.beyond[c.end] {
		delete(c.beyond, c.end)
		c.end++
	}
}

func (c *checkpointer) done() int {
	c.mu.Lock()
	defer c.mu.Unlock()

	return c.end
}

// saveEach saves a checkpoint at each tick; the returned function ends that, and returns once none is being saved.
func (c *checkpointer) saveEach(ctx context.Context, ticks <-chan time.Time) func() {
	ended, done := make(chan struct{}), make(chan struct{})

	go func() {
		defer close(done)

		for {
			select {
			case <-ended:
				return
			case <-ticks:
				// The next one may succeed, and a storage that fails for good fails the backup.
				if err := c.save(ctx, upload.IncompleteReasonCheckpoint); err != nil {
					fmt.Fprintln(c.writer.report.messages, "Cannot save a checkpoint:", err) //nolint:errcheck
				}
			}
		}
	}()

	return func() {
		close(ended)
		<-done
	}
}

// save writes a checkpoint of the blocks that are done, if there are more than at the last time.
func (c *checkpointer) save(ctx context.Context, reason string) error {
	c.saving.Lock()
	defer c.saving.Unlock()

	writer, w, list := c.writer, c.writer.w, c.writer.list[:c.done()]
	if len(list) == 0 || c.saved != nil && !c.unsure && c.saved.Stats.TotalFileSize == list.size() {
		return nil
	}

	// A write that fails beside this flush fails the next one: otherwise kopia might store the manifest without a block.
	if err := w.Flush(ctx); err != nil {
		return errors.Wrap(err, "flush error")
	}

	root, err := list.writeFile(ctx, w, writer.name, writer.description)
	if err != nil {
		return err
	}

	source := c.of
	source.Path = c.decided.Path
	made := buildManifest(source, root, list.size(), c.decided.Tags, nil)
	made.StartTime, made.EndTime = fs.UTCTimestampFromTime(writer.start), fs.UTCTimestampFromTime(w.Time())
	made.IncompleteReason = reason
	made.Tags[sourceTag], made.Tags[ruleTag] = c.of.Path, writer.rule()

	err = writer.saveSnapshot(ctx, made)
	if made.ID != "" {
		c.saved, c.unsure = made, err != nil
	}

	return err
}

// findCheckpoints returns those of all backups of a source.
func findCheckpoints(ctx context.Context, rep repo.Repository, source snapshot.SourceInfo) ([]*snapshot.Manifest, error) {
	return loadCheckpoints(ctx, rep, func(one *manifest.EntryMetadata) bool { return one.Labels[sourceTag] == source.Path })
}

func loadCheckpoints(
	ctx context.Context, rep repo.Repository, isWanted func(*manifest.EntryMetadata) bool,
) ([]*snapshot.Manifest, error) {
	entries, err := rep.FindManifests(ctx, map[string]string{manifest.TypeLabelKey: snapshot.ManifestType})
	if err != nil {
		return nil, errors.Wrap(err, "find checkpoints")
	}

	var ids []manifest.ID

	for _, one := range entries {
		if isWanted(one) {
			ids = append(ids, one.ID)
		}
	}

	found, err := snapshot.LoadSnapshots(ctx, rep, ids)

	return found, errors.Wrap(err, "read checkpoints")
}

// abandonedAge is the age of a checkpoint that no attempt continues from: attempts of a transfer follow each other within hours.
const abandonedAge = 7 * 24 * time.Hour

// findAbandoned returns such checkpoints of all sources: their volume may be gone, and a Velero server's maintenance keeps
// them.
func findAbandoned(ctx context.Context, rep repo.Repository, now time.Time) ([]manifest.ID, error) {
	old, err := loadCheckpoints(ctx, rep, func(one *manifest.EntryMetadata) bool {
		return one.Labels[sourceTag] != "" && now.Sub(one.ModTime) > abandonedAge
	})
	if err != nil {
		return nil, err
	}

	var found []manifest.ID

	for _, one := range old {
		// Whatever its tags are, a complete one is a backup.
		if one.IncompleteReason != "" {
			found = append(found, one.ID)
		}
	}

	return found, nil
}

// discard deletes all checkpoints together with what is written next.
func (c *checkpointer) discard(ctx context.Context) error {
	if c.saved != nil {
		c.decided.Replaces = append(c.decided.Replaces, c.saved.ID)
	}

	if err := deleteIncomplete(ctx, c.writer.w, c.decided.Replaces); err != nil {
		return err
	}

	c.decided.Replaces = nil

	return nil
}

// resume takes the first blocks from a checkpoint. Any doubt about it is an error: then they are read.
func (b *blockWriter) resume(ctx context.Context, id manifest.ID) error {
	found, list, err := loadDevice(ctx, b.w, id)
	if err != nil {
		return err
	}

	if rule := found.Tags[ruleTag]; rule != b.rule() {
		return errors.Errorf("its blocks were read otherwise: %v, not %v", rule, b.rule())
	}

	if count := len(list); count == 0 || count > len(b.list) {
		return errors.Errorf("it has %v bytes, the device %v", list.size(), b.from.size)
	}

	if err := list.verify(ctx, b.w); err != nil {
		return err
	}

	expected := func(at int) (object.ID, bool, error) { return list[at].Object, true, nil }

	differs, err := b.checkSome(ctx, len(list), len(list), expected)
	if err != nil {
		return err
	}

	if differs >= 0 {
		return errors.Errorf("the device has other bytes at %v", int64(differs)*blockSize)
	}

	b.resumed = copy(b.list, list)

	return nil
}

// verify returns an error if the repository does not have a block, or one of another length.
func (l blockList) verify(ctx context.Context, rep repo.Repository) error {
	for at, one := range l {
		if at > 0 && one.Object == l[at-1].Object {
			continue
		}

		content, _, _ := one.Object.ContentID()

		info, err := rep.ContentInfo(ctx, content)
		if err != nil {
			return errors.Wrapf(err, "block %v", at)
		}

		if info.Deleted {
			return errors.Errorf("block %v is deleted", at)
		}

		if info.OriginalLength != blockSize {
			return errors.Errorf("block %v has %v bytes", at, info.OriginalLength)
		}
	}

	return nil
}

// rule returns which blocks are read, and where the others are from.
func (b *blockWriter) rule() string {
	switch {
	case b.marked == nil:
		return "all"
	case b.based:
		return "changed since snapshot " + strconv.Quote(string(b.parentID))
	default:
		return "allocated"
	}
}

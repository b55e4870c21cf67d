package main

import (
	"cmp"
	"context"
	"os"
	"path"
	"path/filepath"
	"slices"
	"sync"

	"github.com/kopia/kopia/fs"
	"github.com/kopia/kopia/repo"
	"github.com/kopia/kopia/repo/blob"
	"github.com/kopia/kopia/repo/content"
	"github.com/kopia/kopia/repo/object"
)

const (
	// requestBytes is how much data takes the time of one more request: 2.5 ms at 13 MB/s.
	requestBytes = 32 << 10
	// smallBytes is the mean content up to which one stream of whole packs is faster than several of contents.
	smallBytes = 256 << 10
	// mostReaders is how many parts of large files are read at a time: as 8 of 4 MB keep a line of 1 GB/s with 30 ms busy.
	mostReaders = 8
	// fewContents take fewer requests than the two for the length and the data of a pack.
	fewContents = 4
)

// packPlan fetches the packs of small files as a whole before the files are restored: kopia would request the content of
// each file, and write a file of its cache for it.
type packPlan struct {
	ctx context.Context //nolint:containedctx // of the fetches, which outlive the reads
	rep repo.DirectRepository
	// kept says of a file that it is not restored.
	kept  func(path string, file fs.File) bool
	slots chan struct{}
	// readers has one for each chunk of a large file that is read or waits to be written.
	readers chan struct{}
	tasks   sync.WaitGroup

	// cache is the directory of kopia's cache, if it is known.
	cache string

	mu    sync.Mutex
	packs map[blob.ID]*plannedPack
	order []*plannedPack
}

// plannedPack is a pack with the number and bytes of the contents that are still to be read from it.
type plannedPack struct {
	index    int
	content  content.Info
	contents int
	bytes    int64
	// length is the least that it can have.
	length int64
	// fetched is closed at the end of its fetch; nil: it was not worth one.
	fetched chan struct{}
}

// newPackPlan returns the plan of a restore by so many workers that fetches so many packs at a time.
func newPackPlan(ctx context.Context, rep repo.DirectRepository, packs, parallel int, kept func(string, fs.File) bool) *packPlan {
	return &packPlan{
		ctx:     ctx,
		rep:     rep,
		kept:    kept,
		slots:   make(chan struct{}, packs),
		readers: make(chan struct{}, min(parallel, mostReaders)),
		cache:   os.Getenv("KOPIA_CACHE_DIRECTORY"),
		packs:   map[blob.ID]*plannedPack{},
	}
}

// wrap returns an entry that waits for the pack of its content before it is read.
func (p *packPlan) wrap(entry fs.Entry, path string) fs.Entry {
	switch entry := entry.(type) {
	case fs.Directory:
		return &plannedDirectory{entry, p, path}
	case fs.File:
		return &plannedFile{entry, p}
	case fs.Symlink:
		return &plannedSymlink{entry, p}
	}

	return entry
}

// objectOf returns the object of an entry; an entry without one has the empty ID.
func objectOf(entry fs.Entry) object.ID {
	if stored, ok := entry.(object.HasObjectID); ok {
		return stored.ObjectID()
	}

	return object.EmptyID
}

// find returns where the content of an object is, unless it has several or none.
func (p *packPlan) find(ctx context.Context, stored object.ID) (content.Info, bool) {
	id, _, ok := stored.ContentID()
	if !ok {
		return content.Info{}, false
	}

	info, err := p.rep.ContentInfo(ctx, id)

	return info, err == nil
}

// addEntry counts what will be read of an entry, and returns the place of its only content, or -1.
func (p *packPlan) addEntry(ctx context.Context, entry fs.Entry) (int, uint32) {
	stored := objectOf(entry)

	if _, indirect := stored.IndexObjectID(); indirect {
		// An error comes again when the file is read.
		parts, _ := loadParts(ctx, p.rep, stored, 0)
		for _, part := range parts {
			if info, found := p.find(ctx, part.Object); found {
				p.add(info)
			}
		}
	} else if info, found := p.find(ctx, stored); found {
		return p.add(info), info.PackOffset
	}

	return -1, 0
}

// add counts what will be read, and returns its place among all packs.
func (p *packPlan) add(info content.Info) int {
	p.mu.Lock()
	defer p.mu.Unlock()

	pack := p.packs[info.PackBlobID]
	if pack == nil {
		pack = &plannedPack{index: len(p.order), content: info}
		p.packs[info.PackBlobID] = pack
		p.order = append(p.order, pack)
	}

	pack.contents++
	pack.bytes += int64(info.PackedLength)
	pack.length = max(pack.length, int64(info.PackOffset)+int64(info.PackedLength))

	return pack.index
}

// hold fetches the pack of an object, and the next ones, if they are worth it. The caller calls the result once it has
// read the object.
func (p *packPlan) hold(ctx context.Context, stored object.ID) func() {
	info, found := p.find(ctx, stored)

	p.mu.Lock()

	pack := p.packs[info.PackBlobID]
	if !found || pack == nil {
		p.mu.Unlock()

		return func() {}
	}

	for _, one := range p.order[pack.index:min(len(p.order), pack.index+1+cap(p.slots))] {
		if one.fetched == nil && one.isWorthFetching() {
			fetched := make(chan struct{})
			one.fetched = fetched

			p.tasks.Go(func() { p.fetch(one, fetched) })
		}
	}

	fetched := pack.fetched
	p.mu.Unlock()

	if fetched != nil {
		<-fetched
	}

	return func() { p.release(pack, info) }
}

// release counts what was read. It removes a pack that nothing needs any more: each of its pages was accessed twice, so
// the kernel takes the whole for the working set of the pod.
func (p *packPlan) release(pack *plannedPack, info content.Info) {
	p.mu.Lock()
	defer p.mu.Unlock()

	pack.contents--
	pack.bytes -= int64(info.PackedLength)

	if pack.contents == 0 && pack.fetched != nil && p.cache != "" {
		// Source: kopia 0.23.1, internal/cache/content_cache.go (BlobIDCacheKey) and cache_storage.go.
		key := string(info.PackBlobID[1:] + info.PackBlobID[:1])
		os.Remove(filepath.Join(p.cache, "contents", key[:2], key[2:]+".f")) //nolint:errcheck // kopia removes it later

		pack.fetched = nil
	}
}

// isWorthFetching returns whether the pack is read faster than what is needed of it.
func (p *plannedPack) isWorthFetching() bool {
	contents := int64(p.contents)

	return contents > fewContents && p.length <= p.bytes+contents*requestBytes && p.length <= contents*smallBytes
}

// fetch gets a pack into the cache, and closes the channel. What fails is left to the reads.
func (p *packPlan) fetch(pack *plannedPack, fetched chan<- struct{}) {
	p.slots <- struct{}{}
	defer func() { <-p.slots }()
	defer close(fetched)

	found, err := p.rep.BlobReader().GetMetadata(p.ctx, pack.content.PackBlobID)
	if err != nil {
		return
	}

	p.mu.Lock()
	pack.length = found.Length
	worth := pack.isWorthFetching()
	if !worth {
		// More of it may be listed yet.
		pack.fetched = nil
	}
	p.mu.Unlock()

	if worth {
		p.rep.PrefetchContents(p.ctx, []content.ID{pack.content.ContentID}, "blobs")
	}
}

// plannedDirectory lists its entries in the order in which they are stored.
type plannedDirectory struct {
	fs.Directory

	plan *packPlan
	path string
}

// Iterate implements fs.Directory.
func (d *plannedDirectory) Iterate(ctx context.Context) (fs.DirectoryIterator, error) {
	entries, err := fs.GetAllEntries(ctx, d.Directory)
	if err != nil {
		return nil, err
	}

	// It keeps a map of them otherwise.
	d.Directory.Close()

	type place struct {
		entry  fs.Entry
		pack   int
		offset uint32
	}

	places := make([]place, len(entries))

	for at, entry := range entries {
		places[at] = place{entry, -1, 0}

		if entry.IsDir() {
			continue
		}

		if file, ok := entry.(fs.File); ok && d.plan.kept(path.Join(d.path, entry.Name()), file) {
			continue
		}

		places[at].pack, places[at].offset = d.plan.addEntry(ctx, entry)
	}

	slices.SortFunc(places, func(one, other place) int {
		if one.pack < 0 && other.pack < 0 {
			return cmp.Compare(one.entry.Name(), other.entry.Name())
		}

		return cmp.Or(cmp.Compare(one.pack, other.pack), cmp.Compare(one.offset, other.offset))
	})

	for at, one := range places {
		entries[at] = d.plan.wrap(one.entry, path.Join(d.path, one.entry.Name()))
	}

	return fs.StaticIterator(entries, nil), nil
}

type plannedFile struct {
	fs.File

	plan *packPlan
}

// Open implements fs.File.
func (f *plannedFile) Open(ctx context.Context) (fs.Reader, error) {
	stored := objectOf(f.File)
	if _, indirect := stored.IndexObjectID(); indirect {
		// kopia also reads a list with an empty part, of a file that shrank, or has the words for what is wrong.
		if parts, err := loadParts(ctx, f.plan.rep, stored, 0); err == nil {
			return f.plan.openAhead(ctx, f.File, parts), nil
		}
	}

	defer f.plan.hold(ctx, stored)()

	return f.File.Open(ctx)
}

type plannedSymlink struct {
	fs.Symlink

	plan *packPlan
}

// Readlink implements fs.Symlink.
func (s *plannedSymlink) Readlink(ctx context.Context) (string, error) {
	defer s.plan.hold(ctx, objectOf(s.Symlink))()

	return s.Symlink.Readlink(ctx)
}

package main

import (
	"context"
	"io"

	"github.com/pkg/errors"

	"github.com/kopia/kopia/fs"
)

// aheadReader reads a large file as far ahead as others leave room for: kopia requests one part after the other.
type aheadReader struct {
	ctx  context.Context //nolint:containedctx // an io.Reader has none
	end  context.CancelFunc
	plan *packPlan
	file fs.File

	left    blockList
	pending []pendingPart
	current []byte
}

// pendingPart is a part that is being read; an extra one has a place of its own among the readers.
type pendingPart struct {
	read  <-chan partRead
	extra bool
}

type partRead struct {
	content []byte
	err     error
}

// openAhead opens a file that consists of parts. It has a place among the readers until it is closed.
func (p *packPlan) openAhead(ctx context.Context, file fs.File, parts blockList) fs.Reader {
	p.readers <- struct{}{}

	ctx, end := context.WithCancel(ctx)

	return &aheadReader{ctx: ctx, end: end, plan: p, file: file, left: parts}
}

// Read implements io.Reader. As kopia's own it fills the buffer across parts: holes of a file are found by its blocks.
func (r *aheadReader) Read(into []byte) (int, error) {
	count := 0

	for count < len(into) {
		if len(r.current) == 0 {
			r.request()

			if len(r.pending) == 0 {
				break
			}

			done := r.take()
			if done.err != nil {
				return 0, done.err
			}

			r.current = done.content
		}

		copied := copy(into[count:], r.current)
		r.current, count = r.current[copied:], count+copied
	}

	if count == 0 {
		return 0, io.EOF
	}

	return count, nil
}

// request has the next part read, and as many more as there are places.
func (r *aheadReader) request() {
	for len(r.left) > 0 {
		extra := len(r.pending) > 0
		if extra {
			select {
			case r.plan.readers <- struct{}{}:
			default:
				return
			}
		}

		part, read := r.left[0], make(chan partRead, 1)
		r.left, r.pending = r.left[1:], append(r.pending, pendingPart{read, extra})

		go func() {
			content, release := make([]byte, part.Length), r.plan.hold(r.ctx, part.Object)
			err := readPart(r.ctx, r.plan.rep, part, 0, content)
			// Before the end of the call: a pack would be left in the cache.
			release()
			read <- partRead{content, err}
		}()
	}
}

// take waits for the first part that is being read.
func (r *aheadReader) take() partRead {
	first := r.pending[0]
	r.pending = r.pending[1:]
	done := <-first.read

	if first.extra {
		<-r.plan.readers
	}

	return done
}

// Seek implements io.Seeker.
func (r *aheadReader) Seek(int64, int) (int64, error) {
	return 0, errors.New("it is read from its start to its end")
}

// Close implements io.Closer.
func (r *aheadReader) Close() error {
	r.end()

	for len(r.pending) > 0 {
		r.take()
	}

	<-r.plan.readers

	return nil
}

// Entry implements fs.Reader.
func (r *aheadReader) Entry() (fs.Entry, error) {
	return r.file, nil
}

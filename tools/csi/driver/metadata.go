package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log"
	"math"
	"os"
	"strconv"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// The service SnapshotMetadata: which parts of a snapshot are not zero, or differ from an earlier one of its volume, which
// must still exist. Their files are compared where one of them has no hole.
//
// A fault of it has the kind `changes`. Beside those of all kinds there are `fixed`, which is none (all parts have the same
// length), `unavailable`, `break:NUMBER` after so many messages, and answers that are wrong: `capacity`, `overlap`,
// `beyond` the end, and `forget`, which names nothing.

const (
	grain    = 4 << 10
	chunk    = 1 << 20 // is read at once
	mostSent = 16      // parts in a message
)

// answer is what is sent, until it breaks off after so many messages, if any.
type answer struct {
	kind     csi.BlockMetadataType
	capacity int64
	parts    []*csi.BlockMetadata
	breaks   int
}

func (d *driver) GetMetadataAllocated(
	in *csi.GetMetadataAllocatedRequest, out csi.SnapshotMetadata_GetMetadataAllocatedServer,
) error {
	a, err := d.answer(out.Context(), in.SnapshotId, nil, in.StartingOffset)
	if err != nil {
		return err
	}
	return a.send(int(in.MaxResults), func(some []*csi.BlockMetadata) error {
		return out.Send(&csi.GetMetadataAllocatedResponse{
			BlockMetadataType: a.kind, VolumeCapacityBytes: a.capacity, BlockMetadata: some,
		})
	})
}

func (d *driver) GetMetadataDelta(in *csi.GetMetadataDeltaRequest, out csi.SnapshotMetadata_GetMetadataDeltaServer) error {
	base, err := d.taken(in.BaseSnapshotId)
	if err != nil {
		return err
	}
	a, err := d.answer(out.Context(), in.TargetSnapshotId, base, in.StartingOffset)
	if err != nil {
		return err
	}
	return a.send(int(in.MaxResults), func(some []*csi.BlockMetadata) error {
		return out.Send(&csi.GetMetadataDeltaResponse{
			BlockMetadataType: a.kind, VolumeCapacityBytes: a.capacity, BlockMetadata: some,
		})
	})
}

func (d *driver) answer(ctx context.Context, id string, base *snapshot, from int64) (*answer, error) {
	shot, err := d.taken(id)
	if err != nil {
		return nil, err
	}
	files := []string{d.store.snapshot(id)}
	if base != nil {
		files = append(files, d.store.snapshot(base.ID))
	}
	switch {
	case base != nil && base.Volume != shot.Volume:
		return nil, status.Errorf(codes.InvalidArgument, "snapshots %s and %s are of different volumes", base.ID, id)
	case from < 0 || from > shot.Bytes:
		return nil, status.Errorf(codes.OutOfRange, "offset %d is not in snapshot %s", from, id)
	}
	if err := d.faults.wait(ctx, "changes", shot.About, shot.Taken); err != nil {
		return nil, err
	}
	a, began := &answer{kind: csi.BlockMetadataType_VARIABLE_LENGTH, capacity: shot.Bytes}, time.Now()
	if a.parts, err = differences(files, from, shot.Bytes); err != nil {
		return nil, err
	}
	log.Printf("%s: compared in %.2f s", id, time.Since(began).Seconds())
	return a, a.spoil(d.faults.find(ctx, "changes", shot.About))
}

func (a *answer) spoil(fault, value string) error {
	switch fault {
	case "fixed":
		a.kind, a.parts = csi.BlockMetadataType_FIXED_LENGTH, slice(a.parts)
	case "unavailable":
		return status.Error(codes.Unavailable, "the storage restarts")
	case "break":
		a.breaks, _ = strconv.Atoi(value)
	case "capacity":
		a.capacity += grain
	case "overlap":
		a.parts = append(a.parts, &csi.BlockMetadata{ByteOffset: 0, SizeBytes: grain})
	case "beyond":
		a.parts = append(a.parts, &csi.BlockMetadata{ByteOffset: a.capacity, SizeBytes: grain})
	case "forget":
		a.parts = nil
	}
	return nil
}

// send sends all messages; one that breaks off does so after its last one at the latest.
func (a *answer) send(most int, send func([]*csi.BlockMetadata) error) error {
	if most <= 0 || most > mostSent {
		most = mostSent
	}
	for sent := 1; len(a.parts) > 0; sent++ {
		some := a.parts[:min(most, len(a.parts))]
		if err := send(some); err != nil {
			return err
		}
		a.parts = a.parts[len(some):]
		if a.breaks > 0 && (sent == a.breaks || len(a.parts) == 0) {
			return status.Error(codes.Internal, "the storage lost the rest")
		}
	}
	return nil
}

// slice returns the same parts in pieces of one length.
func slice(parts []*csi.BlockMetadata) (pieces []*csi.BlockMetadata) {
	for _, part := range parts {
		for at := part.ByteOffset; at < part.ByteOffset+part.SizeBytes; at += grain {
			pieces = append(pieces, &csi.BlockMetadata{ByteOffset: at, SizeBytes: grain})
		}
	}
	return pieces
}

// differences returns the parts, in order, that the first file has and the second one has not; that, and what is beyond its
// end, is zeros if it is not named.
func differences(names []string, from, size int64) (found []*csi.BlockMetadata, err error) {
	files, content := make([]*os.File, len(names)), [][]byte{make([]byte, chunk), make([]byte, chunk)}
	for i, name := range names {
		if files[i], err = os.Open(name); err != nil {
			return nil, err
		}
		defer files[i].Close()
	}
	for at := from; at < size; at += chunk {
		next := size
		for _, file := range files {
			next = min(next, dataFrom(file, at))
		}
		at = next / grain * grain
		for i, file := range files {
			count, err := file.ReadAt(content[i], at)
			if clear(content[i][count:]); err != nil && !errors.Is(err, io.EOF) {
				return nil, err
			}
		}
		for start := int64(0); start < min(chunk, size-at); start += grain {
			end := min(start+grain, size-at)
			if bytes.Equal(content[0][start:end], content[1][start:end]) {
				continue
			}
			if last := len(found) - 1; last >= 0 && found[last].ByteOffset+found[last].SizeBytes == at+start {
				found[last].SizeBytes += end - start
			} else {
				found = append(found, &csi.BlockMetadata{ByteOffset: at + start, SizeBytes: end - start})
			}
		}
	}
	return found, nil
}

// dataFrom returns where the next part of a file begins that is no hole.
func dataFrom(file *os.File, at int64) int64 {
	found, err := file.Seek(at, unix.SEEK_DATA)
	if errors.Is(err, unix.ENXIO) {
		return math.MaxInt64
	} else if err != nil { // its file system knows no holes
		return at
	}
	return found
}

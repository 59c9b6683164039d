// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * Who may hand out the rows of a section: its one owner, by locks that end with their session.
 *
 * OWN is held by the dispatcher; WORK is held shared by each worker session. A new owner takes OWN,
 * then WORK exclusively once, so that the old owner's workers have settled or are gone.
 */
import * as Context from "effect/Context"
import type * as Effect from "effect/Effect"
import type * as Scope from "effect/Scope"
import type { DatabaseError } from "./DatabaseError.ts"

/** Sections held until the scope closes or `lost` returns. */
export interface Owned {
  /**
   * Raised by every taking: two takings by the same process with adjacent epochs had no owner
   * between.
   */
  readonly epochs: ReadonlyMap<string, number>
  /** Returns when the session that holds the locks is gone. */
  readonly lost: Effect.Effect<void>
}

export class Ownership extends Context.Service<
  Ownership,
  {
    /**
     * Waits until all of `sections` are ours and the workers of an earlier owner are gone; sessions
     * of workers that do not end within `patience` are ended. `owner` is what others are told. With
     * the epochs of an earlier taking by this process, sections that nobody had since keep their
     * workers.
     */
    readonly own: (
      sections: ReadonlyArray<string>,
      owner: string,
      before?: ReadonlyMap<string, number>
    ) => Effect.Effect<Owned, DatabaseError, Scope.Scope>
    /**
     * In a worker: holds WORK of the section in shared mode on the session that all its statements
     * use, and on each one that takes the place of a lost one, before anything else; gives the
     * backend's pid.
     */
    readonly work: (section: string) => Effect.Effect<number, DatabaseError, Scope.Scope>
    /** In a worker: pid of its backend now; another after its session was lost and made again. */
    readonly backend: Effect.Effect<number, DatabaseError>
    /** Ends a session by its backend pid and waits until it is gone (at most 5 s). */
    readonly endBackend: (pid: number) => Effect.Effect<void, DatabaseError>
  }
>()("pepsi/services/Ownership") {}
